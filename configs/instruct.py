"""Instruction tuning of the quickstart's model, or of any language model given by --init-from.

    python examples/python_questions.py questions.jsonl
    python -m train fit instruct --init-from runs/quickstart --data.path questions.jsonl
    python -m train sample runs/instruct --chat

The data are conversations in JSON lines; the loss counts the tokens of the answers alone.
"""

import dataclasses

from configs.quickstart import EXPERIMENTS as QUICKSTART
from train.data.conversations import ConversationDataConfig
from train.data.data_config import TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.instruction import InstructionTuning

EXPERIMENTS = {
    "instruct": dataclasses.replace(
        QUICKSTART["quickstart"],
        name="instruct",
        task=InstructionTuning(),
        data=ConversationDataConfig(
            max_length=128,
            max_buckets=1,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
        ),
        optimizer=AdamW(beta2=0.98, weight_decay=0.0),
        schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=20, min_lr_ratio=0.0),
        steps=300,
        batch_size=8,
        log_every=20,
        evaluation=EvaluationConfig(every=100),
        sample=SampleConfig(every=100, prompt="What does os.path.join do?", max_new_tokens=40),
        checkpoint=CheckpointConfig(every=100),
    )
}
