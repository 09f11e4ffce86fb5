"""Sequences whose keys are spread over two ranks are attended to as if they were on one; the checks are in
rank_attention.py."""


def test_two_ranks_compute_what_one_does_and_mistakes_are_errors_on_both(ranks):
    ranks.check("rank_attention.py")
