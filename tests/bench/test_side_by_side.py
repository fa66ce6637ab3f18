"""Alternating measurements, and their statistics."""

from bench.contender import Record
from bench.side_by_side import compare


def record(
    name: str,
    seconds: tuple[float, ...],
    others: tuple[float | None, ...] = (None,),
    loss: float | None = None,
) -> Record:
    return Record(
        name,
        versions={"jax": "1.2"},
        facts={"parameters": 1234},
        build_seconds=1.5,
        seconds=seconds,
        others=others,
        losses=(loss,) * len(seconds),
        peak_memory_bytes=3 << 20,
    )


def test_ratios_are_taken_round_by_round() -> None:
    # Both slow down by 10 in the last round, which changes the rates but not the ratios.
    base = record("peer", (2.0, 2.0, 2.0, 2.0, 20.0))
    own = record("ours", (1.0, 2.0, 4.0, 0.5, 10.0))
    ours, peer = compare([own, base], "peer", work=120.0)
    assert (ours.rate, ours.ratio, ours.ratio_quartiles) == (60.0, 2.0, (1.0, 2.0))
    assert (peer.rate, peer.ratio, peer.ratio_quartiles) == (60.0, 1.0, (1.0, 1.0))
