"""Multi30k with a non-autoregressive decoder (after Gu et al. 2018).

    python -m train fit multi30k_parallel --data.path multi30k/raw/train \
        --data.validation-path multi30k/raw/val --data.test-path multi30k/raw/test_2016_flickr

The model, data and steps of `multi30k`; the length of the target is predicted, and all its
tokens are generated at once, independently of each other.
"""

import dataclasses

from configs.multi30k import EXPERIMENTS as MULTI30K

_AUTOREGRESSIVE = MULTI30K["multi30k"]

EXPERIMENTS = {
    "multi30k_parallel": dataclasses.replace(
        _AUTOREGRESSIVE,
        name="multi30k-parallel",
        model=dataclasses.replace(_AUTOREGRESSIVE.model, causal=False),
    )
}
