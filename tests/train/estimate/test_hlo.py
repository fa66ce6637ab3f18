import pytest

from train.estimate.hlo import Program, array_bytes, array_shapes

LOOPS = """HloModule loops, num_partitions=2

%wrapped (a: f32[2]) -> f32[4] {
  %a = f32[2]{0} parameter(0)
  ROOT %all-gather.1 = f32[4]{0} all-gather(%a), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}

%inner_body (b: f32[2]) -> f32[2] {
  ROOT %b = f32[2]{0} parameter(0)
}

%inner_condition (c: f32[2]) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %count = s32[]{:T(128)} constant(-1)
  ROOT %less = pred[]{:T(512)} compare(%count, %bound), direction=LT
}

%outer_body (d: f32[2]) -> f32[2] {
  %d = f32[2]{0} parameter(0)
  %start = ((f32[2]{0}), f32[4]{0}, u32[]) async-start(%d), calls=%wrapped
  %done = f32[4]{0} async-done(%start), calls=%wrapped
  ROOT %while.1 = f32[2]{0:T(128)} while(%d), condition=%inner_condition, body=%inner_body
}

%unknown (e: f32[2]) -> pred[] {
  ROOT %e = f32[2]{0} parameter(0)
}

ENTRY %main (f: f32[2]) -> f32[2] {
  %f = f32[2]{0} parameter(0)
  %while.2 = f32[2]{0} while(%f), condition=%unknown, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %choice = f32[2]{0} conditional(%f, %f, %f), branch_computations={%inner_body, %inner_body}
}
"""  # noqa: E501


def test_nested_loops_multiply() -> None:
    """Trip counts that the compiler notes, or that follow from the condition alone, as on a TPU."""
    program = Program.parse(LOOPS)
    assert program.entry == "main"
    runs = program.execution_counts()
    assert runs["main"] == 1
    assert (runs["outer_body"], runs["wrapped"]) == (3, 3)  # a `-done` op starts nothing
    assert runs["inner_body"] == 3 * 5 + 2  # both branches


def test_loop_with_unknown_trip_count_counts_once() -> None:
    program = Program.parse(LOOPS.replace('"n":"3"', '"n":"many"'))
    assert program.execution_counts()["outer_body"] == 1


def test_instructions() -> None:
    gather = Program.parse(LOOPS).computations["wrapped"]["all-gather.1"]
    assert (gather.opcode, gather.type) == ("all-gather", "f32[4]{0}")
    assert gather.operands == ("a",)
    assert gather.attribute("replica_groups") == "{{0,1}}"
    assert gather.attribute("dimensions") == "{0}"
    assert gather.attribute("metadata") == ""


def test_types() -> None:
    tiled = "(bf16[6,128,256]{2,1,0:T(8,128)(2,1)S(1)}, /*index=5*/pred[3]{0}, s32[], s4[3]{0})"
    assert array_bytes(tiled) == 6 * 128 * 256 * 2 + 3 + 4 + 2
    assert array_shapes(tiled) == ((6, 128, 256), (3,), (), (3,))
    assert array_bytes("f8e4m3fn[7]{0}") == 7


def test_text_without_entry_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no ENTRY"):
        Program.parse("HloModule nothing\n")
