"""Every schedule keeps its closed forms: makespan in three models of time, and what its devices keep.

Some points of the grid, none so large that it takes long; `python -m benchmarks.schedules` compares all of it.
"""

import pytest

from benchmarks.closed_forms import FORMS, deviations

POINTS = [(2, 4), (3, 7), (4, 8), (6, 12), (8, 16), (8, 24), (16, 32)]
MOST = 768  # stages times micro-batches


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_simulated_schedule_is_its_closed_form(form):
    points = [(p, m) for p, m in POINTS if form.holds(p, m) and len(form.row(p, m).layout.stages) * m <= MOST]
    assert points, "none of the points is one that the form is stated for"
    assert [one for p, m in points for one in deviations(form, p, m)] == []
