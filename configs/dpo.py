"""Direct preference optimization of a LoRA adapter on pairs of answers.

    python examples/python_questions.py questions.jsonl pairs.jsonl
    python -m train fit dpo --init-from runs/instruct --data.path pairs.jsonl

The model is that of `instruct`; for another one, --init-from W --init-model.
"""

import dataclasses

from configs.instruct import EXPERIMENTS as INSTRUCT
from train.data.data_config import TokenizerConfig
from train.data.preferences import PreferenceDataConfig
from train.engines.lora import LoRAConfig
from train.optim.schedules import ScheduleConfig
from train.tasks.preference import PreferenceOptimization

EXPERIMENTS = {
    "dpo": dataclasses.replace(
        INSTRUCT["instruct"],
        name="dpo",
        task=PreferenceOptimization(),
        data=PreferenceDataConfig(
            max_length=192,
            max_buckets=2,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
        ),
        lora=LoRAConfig(rank=8, targets=("all",), train_fully=()),
        schedule=ScheduleConfig("cosine", learning_rate=5e-4, warmup_steps=20, min_lr_ratio=0.0),
        steps=200,
    )
}
