"""What differs between ranks is named, with the ranks."""

from lightning_pipe.runtime.agree import disagreements


def test_equal_ranks_agree() -> None:
    assert disagreements([{"plan": "a", "graph": "b"}] * 3) == []


def test_every_difference_is_named_with_its_ranks() -> None:
    said = [{"plan": "a", "graph": "b"}] * 3 + [{"plan": "c", "graph": "b"}, {"plan": "a"}]
    assert disagreements(said) == [
        "plan is a on ranks 0-2, 4, c on rank 3",
        "graph is b on ranks 0-3, missing on rank 4",
    ]
