"""Contract tests for mixers: `check_mixer` tests every ability that a mixer declares."""

from transformer.testing.contract import check_mixer as check_mixer
from transformer.testing.mixer_under_test import Trial as Trial
from transformer.testing.mixer_under_test import make_trial as make_trial
