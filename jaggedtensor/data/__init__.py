"""Batches that keep many workers equally busy: how many tokens, which sequences, and which rank gets them."""

from jaggedtensor.data.assign import SequenceCost as SequenceCost
from jaggedtensor.data.assign import assign as assign
from jaggedtensor.data.assign import imbalance as imbalance
from jaggedtensor.data.parquet import ParquetSequences as ParquetSequences
from jaggedtensor.data.sampler import TokenBudgetSampler as TokenBudgetSampler
