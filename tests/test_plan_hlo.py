"""Collectives counted in programs' text: loops, asynchronous pairs, fusions."""

from __future__ import annotations

from jaxrl.planner.hlo import collectives_of, gathered_shapes
from jaxrl.planner.memory import Collective

GPU = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%lb (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %w = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %wd = bf16[16,8]{1,0} all-gather-done(%w)
  %s = f32[4,8]{1,0} reduce-scatter(%y), to_apply=%add
}

%lc (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%micro_body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %l = (s32[]) while(%t), condition=%lc, body=%lb, backend_config={"known_trip_count":{"n":"3"}}
}

%micro_cond (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %c = pred[] compare(%i, %busy), direction=LT
}

ENTRY %main (p: f32[4,8]) -> f32[] {
  %micros = (s32[], f32[4,8]) while(%t), condition=%micro_cond, body=%micro_body
  ROOT %norms = (f32[], f32[2]) all-reduce(%a, %b), to_apply=%add
}
"""
TPU = """\
HloModule jit_step

%cond (p: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(5), metadata={op_name="x"}
  ROOT %c = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%all-reduce-scatter.1 (p: f32[8,2]) -> f32[1,2] {
  %r = f32[8,2]{1,0:T(8,128)} all-reduce(%p), to_apply=%add
  ROOT %d = f32[1,2]{1,0:T(8,128)} dynamic-slice(%r, %i)
}

%body (p: (s32[])) -> (s32[]) {
  %f = f32[1,2]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %g = bf16[4,6]{1,0:T(8,128)(2,1)} all-gather(%y), dimensions={0}
}

ENTRY %main.1_spmd (p: s32[]) -> s32[] {
  ROOT %w = (s32[]{:T(128)}) while(%t), condition=%cond, body=%body
}
"""


def test_loops_multiply_and_those_that_depend_on_data_are_the_callers():
    depths = []

    def micros(depth: int) -> int:
        depths.append(depth)
        return 7

    found = collectives_of(GPU, micros)
    assert depths == [0]
    assert found == (
        Collective("all-gather", 1, 7 * 3, 7 * 3 * 16 * 8 * 2),
        Collective("all-reduce", 1, 1, 4 + 2 * 4),
        Collective("reduce-scatter", 1, 7 * 3, 7 * 3 * 4 * 8 * 4),
    )


def test_a_tpus_loops_are_as_long_as_their_condition_says_and_its_scatters_are_fusions():
    found = collectives_of(TPU, lambda depth: 100)
    assert found == (
        Collective("all-gather", 1, 5, 5 * 4 * 6 * 2),
        Collective("reduce-scatter", 1, 5, 5 * 8 * 2 * 4),
    )


def test_shapes_of_what_is_gathered():
    assert list(gathered_shapes(GPU)) == [(16, 8)]
    assert list(gathered_shapes(TPU)) == [(4, 6)]
