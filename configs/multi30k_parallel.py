"""Multi30k by a decoder that writes all words at once (after Gu et al. 2018).

    python -m train fit multi30k_parallel --data.path multi30k/raw/train \
        --data.validation-path multi30k/raw/val --data.test-path multi30k/raw/test_2016_flickr

The model, data and steps of `multi30k`; the target's length is predicted, and no word knows which
others are written beside it.
"""

import dataclasses

from configs.multi30k import EXPERIMENTS as MULTI30K

_WORD_BY_WORD = MULTI30K["multi30k"]

EXPERIMENTS = {
    "multi30k_parallel": dataclasses.replace(
        _WORD_BY_WORD,
        name="multi30k-parallel",
        model=dataclasses.replace(_WORD_BY_WORD.model, causal=False),
    )
}
