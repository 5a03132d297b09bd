"""The minimum cut against exhaustive search, on random small graphs."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.policies.cut import CutOp, minimum_cut

UNIT = 2e-6  # share of all seconds that rounding to integers may cost, per edge


@st.composite
def graphs(draw):
    """Ops in order, each reading earlier values; some values can't be kept, some are needed."""
    num_sources = draw(st.integers(1, 3))
    num_values = num_sources
    ops = []
    for _ in range(draw(st.integers(1, 6))):
        reads = tuple(sorted(draw(st.sets(st.integers(0, num_values - 1), min_size=1, max_size=3))))
        makes = tuple(range(num_values, num_values + draw(st.integers(1, 3))))
        num_values += len(makes)
        ops.append(CutOp(reads, makes, draw(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.25, 7.0]))))
    made = range(num_sources, num_values)
    keep = {v: draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 4.0, 9.0])) for v in range(num_values)}
    for v in made:
        if draw(st.integers(0, 5)) == 0:
            del keep[v]
    needed = frozenset(draw(st.sets(st.sampled_from(list(made)), min_size=1)))
    return ops, keep, needed


def kept_with(ops, needed, again):
    """What must be kept when exactly the ops in `again` run again."""
    made = {v for op in again for v in op.makes}
    return (set(needed) | {v for op in again for v in op.reads}) - made


def cost_of(ops, keep, needed, again):
    kept = kept_with(ops, needed, again)
    return sum(op.seconds for op in again) + sum(keep.get(v, math.inf) for v in kept)


def best_by_search(ops, keep, needed):
    subsets = itertools.chain.from_iterable(itertools.combinations(ops, n) for n in range(len(ops) + 1))
    return min(cost_of(ops, keep, needed, again) for again in subsets)


@given(graphs())
@settings(max_examples=250)
def test_cut_costs_as_little_as_the_best_of_all_subsets(graph):
    ops, keep, needed = graph
    best = best_by_search(ops, keep, needed)
    if math.isinf(best):
        return

    cut = minimum_cut(ops, keep, needed)

    slack = UNIT * sum(op.seconds for op in ops) * (len(ops) + len(keep))
    # A bound must stay one: never above the best, and below it by rounding only.
    assert best - slack <= cut.cost_s <= best + 1e-9
    # And the choice itself is as good as its price says.
    again = [op for op in ops if cut.recomputed & set(op.makes)]
    assert cost_of(ops, keep, needed, again) <= best + slack


@given(graphs(), st.floats(0.1, 10.0))
def test_dearer_memory_never_makes_the_cut_cheaper(graph, factor):
    ops, keep, needed = graph
    if math.isinf(best_by_search(ops, keep, needed)):
        return
    low, high = sorted([1.0, factor])

    cheap = minimum_cut(ops, {v: low * s for v, s in keep.items()}, needed)
    dear = minimum_cut(ops, {v: high * s for v, s in keep.items()}, needed)

    slack = UNIT * sum(op.seconds for op in ops) * (len(ops) + len(keep))
    assert dear.cost_s >= cheap.cost_s - slack


@given(graphs())
def test_cut_does_not_depend_on_the_order_of_ops(graph):
    ops, keep, needed = graph
    if math.isinf(best_by_search(ops, keep, needed)):
        return
    shuffled = ops[:]
    random.Random(0).shuffle(shuffled)

    assert minimum_cut(shuffled, keep, needed).cost_s == pytest.approx(minimum_cut(ops, keep, needed).cost_s, abs=1e-12)


def test_op_of_two_outputs_is_paid_for_once():
    op = CutOp((0,), (1, 2), 1.0)

    cut = minimum_cut([op], {0: 0.0, 1: 0.75, 2: 0.75}, frozenset({1, 2}))

    assert cut.recomputed == {1, 2}
    assert cut.cost_s == pytest.approx(1.0, abs=1e-5)


def test_value_that_cannot_be_kept_is_made_again_at_any_price():
    op = CutOp((0,), (1,), 1e6)

    assert minimum_cut([op], {0: 0.0}, frozenset({1})).recomputed == {1}


def test_chain_recomputes_from_its_cheapest_ancestor():
    chain = [CutOp((0,), (1,), 1.0), CutOp((1,), (2,), 1.0), CutOp((2,), (3,), 1.0)]

    cut = minimum_cut(chain, {0: 100.0, 1: 0.5, 2: 50.0, 3: 50.0}, frozenset({3}))

    assert cut.recomputed == {2, 3}
    assert cut.cost_s == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize(("ops", "needed"), [([], frozenset()), ([CutOp((0,), (1,), 1.0)], frozenset())])
def test_nothing_needed_costs_nothing(ops, needed):
    cut = minimum_cut(ops, {0: 1.0, 1: 1.0}, needed)

    assert (cut.recomputed, cut.cost_s) == (frozenset(), 0.0)


def test_capacities_of_a_large_graph_do_not_overflow():
    num = 4000
    ops = [CutOp((v,), (v + 1,), 1.0 + (v % 7)) for v in range(num)]
    keep = {v: 1000.0 for v in range(num + 1)}

    cut = minimum_cut(ops, keep, frozenset(range(1, num + 1)))

    assert cut.recomputed == set(
        range(2, num + 1)
    )  # the first value is kept: that is no dearer than what it is made of
    total = sum(op.seconds for op in ops[1:]) + 1000.0
    assert total * 0.99 <= cut.cost_s <= total + 1e-6
