import numpy as np
import pytest

from tests.train.data.conftest import MakeStream
from train.data.batches import TextEvaluationBatches


def test_windows_match_hand_computed_values(make_stream: MakeStream) -> None:
    # 0 1 2 3 0 4 5 0 6 0: nine targets in windows of four, plus an empty row in the second batch.
    batches = TextEvaluationBatches(
        make_stream([1, 2, 3], [4, 5], [6]), batch_size=2, sequence_length=4, document_masking=True
    )
    assert len(batches) == 2
    first, second = batches
    assert first["tokens"].tolist() == [[0, 1, 2, 3], [0, 4, 5, 0]]
    assert first["targets"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 6]]
    assert first["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 2]]
    assert first["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert first["weights"].tolist() == [[1] * 4] * 2
    assert second["tokens"].tolist() == [[6, 0, 0, 0], [0] * 4]
    assert second["targets"].tolist() == [[0] * 4] * 2
    assert second["weights"].tolist() == second["segments"].tolist() == [[1, 0, 0, 0], [0] * 4]
    assert second["examples"].tolist() == [2, 3]


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("stride", [None, 1, 3])
@pytest.mark.parametrize("targets", [2, 7, 8, 53])
def test_every_target_counts_once_and_in_order(
    make_stream: MakeStream, targets: int, stride: int | None, segments: bool
) -> None:
    stream = make_stream(list(range(1, targets)))
    counted: list[int] = []
    for batch in TextEvaluationBatches(
        stream, batch_size=3, sequence_length=7, stride=stride, document_masking=segments
    ):
        assert {array.shape for array in batch.values()} == {(3, 7), (3,)}
        for row, weights in zip(batch["targets"], batch["weights"], strict=True):
            counted += row[weights == 1].tolist()
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
        assert (batch["segments"] > 0)[batch["weights"] == 1].all()
    assert counted == [*range(1, targets), 0]


def test_overlapping_windows_give_every_target_context(make_stream: MakeStream) -> None:
    (batch,) = TextEvaluationBatches(
        make_stream(list(range(1, 9))),
        batch_size=3,
        sequence_length=5,
        stride=2,
        document_masking=True,
    )
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8]]
    assert batch["weights"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]


def test_limited_windows_are_spread_over_the_stream(make_stream: MakeStream) -> None:
    def begins(limit: int | None) -> list[int]:
        batches = TextEvaluationBatches(
            make_stream(list(range(1, 100))),
            batch_size=2,
            sequence_length=5,
            document_masking=True,
            max_batches=limit,
        )
        return [row[0] for batch in batches for row in batch["tokens"].tolist()]

    assert begins(2) == [0, 25, 50, 75]
    assert begins(None) == begins(0) == begins(99) == list(range(0, 100, 5))


def test_limited_overlapping_windows_count_new_targets_only(make_stream: MakeStream) -> None:
    (batch,) = TextEvaluationBatches(
        make_stream(list(range(1, 100))),
        batch_size=2,
        sequence_length=5,
        stride=2,
        document_masking=True,
        max_batches=1,
    )
    assert batch["weights"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_each_host_takes_its_rows(make_stream: MakeStream) -> None:
    batches = TextEvaluationBatches(
        make_stream(list(range(1, 47))), batch_size=4, sequence_length=5, document_masking=True
    )
    for cursor in range(len(batches)):
        halves = [batches.host_batch(cursor, host, 2) for host in range(2)]
        for name, array in batches.host_batch(cursor, 0, 1).items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in halves]), array)


def test_stride_larger_than_the_window_is_an_error(make_stream: MakeStream) -> None:
    with pytest.raises(ValueError, match="stride 6 is not in 1 to 5"):
        TextEvaluationBatches(
            make_stream([1, 2]), batch_size=1, sequence_length=5, stride=6, document_masking=True
        )
