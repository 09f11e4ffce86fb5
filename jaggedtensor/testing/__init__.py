"""For tests of code that uses jagged tensors: hard batches, a loop over a list to compare with, and error budgets.

>>> from jaggedtensor.testing import assert_same_as_loop, make_jagged
>>> batch = make_jagged([3, 0, 1], 4, slack=2)  # two rows of NaN after the last token
>>> assert_same_as_loop(lambda jt: jt.sum(1), lambda xs: torch.stack([x.sum(0) for x in xs]), [batch])

`jaggedtensor.testing.strategies` draws such batches with hypothesis.
"""

from jaggedtensor.testing.attention import AttentionCase as AttentionCase
from jaggedtensor.testing.attention import AttentionResult as AttentionResult
from jaggedtensor.testing.attention import assert_attention_within_budget as assert_attention_within_budget
from jaggedtensor.testing.attention import attend_by_sequence as attend_by_sequence
from jaggedtensor.testing.budgets import assert_within_budget as assert_within_budget
from jaggedtensor.testing.budgets import error_budget as error_budget
from jaggedtensor.testing.cases import LENGTHS as LENGTHS
from jaggedtensor.testing.cases import make_jagged as make_jagged
from jaggedtensor.testing.cases import offsets_of as offsets_of
from jaggedtensor.testing.loops import assert_same_as_loop as assert_same_as_loop
