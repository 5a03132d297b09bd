"""The demo at a reduced size: equal numbers, every peak within its budget, and a table and JSON that say so."""

import dataclasses
import json

import pytest
from rich.console import Console

from memopt.demo import Result, Shape, batch_at, run_demo, standard_library_text
from memopt.report import demo_report, demo_to_json

SMALL = Shape(layers=4, width=64, heads=2, batch=4, seq=128, steps=4, shares=(0.8, 0.6))


@pytest.fixture(scope="module")
def result() -> Result:
    return run_demo(SMALL)


def test_losses_and_weights_are_those_of_the_plain_run(result):
    plain, *budgeted = result.rows
    assert len(plain.losses) == SMALL.steps
    assert len(budgeted) == 2
    for row in budgeted:
        assert row.losses == plain.losses
        assert row.is_equal


def test_measured_peaks_are_within_budgets_that_force_recomputation(result):
    plain, *budgeted = result.rows
    for row, share in zip(budgeted, SMALL.shares, strict=True):
        assert row.budget_bytes == int(share * plain.measured_bytes)
        assert row.num_recomputed > 0
        assert row.measured_bytes <= row.budget_bytes
    assert result.is_good


def test_a_differing_loss_or_a_peak_over_its_budget_is_not_good(result):
    plain, first, second = result.rows
    differing = dataclasses.replace(first, is_equal=False)
    over = dataclasses.replace(second, measured_bytes=second.budget_bytes + 1)
    assert not dataclasses.replace(result, rows=(plain, differing, second)).is_good
    assert not dataclasses.replace(result, rows=(plain, first, over)).is_good


def test_table_and_json_tell_the_same(result):
    console = Console(width=160)
    with console.capture() as captured:
        console.print(demo_report(result))
    data = json.loads(json.dumps(demo_to_json(result)))
    assert data["is_good"] is True
    assert "good: equal numbers" in captured.get()
    assert [row["is_within"] for row in data["rows"]] == [True, True, True]


def test_text_and_batches_are_the_same_every_time():
    text = standard_library_text()
    (ids, target), (again, _) = batch_at(text, 3, SMALL), batch_at(text, 3, SMALL)
    assert ids.equal(again)
    assert ids.shape == target.shape == (SMALL.batch, SMALL.seq)
    assert ids[:, 1:].equal(target[:, :-1])


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 3 steps"):
        run_demo(dataclasses.replace(SMALL, steps=2))
