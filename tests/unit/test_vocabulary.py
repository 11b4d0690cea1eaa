"""Draft vocabularies: always valid, never missing what must be in."""

import pytest
import torch

from slipstream.errors import CheckpointError, SettingError
from slipstream.models.vocabulary import DraftVocabulary


def test_fewer_distinct_ids_than_wanted_fill_up():
    """B72: 20 distinct ids for a vocabulary of 32: no duplicates, special ids in."""
    counts = torch.zeros(97, dtype=torch.int64)
    counts[40:60] = torch.arange(1, 21)
    vocabulary = DraftVocabulary.from_counts(counts, 32, always=[0, 1, 96])
    ids = vocabulary.target_ids.tolist()
    assert len(set(ids)) == 32 and {0, 1, 96, *range(40, 60)} <= set(ids)


def test_forced_ids_displace_frequent_ones():
    """B74: byte and special ids are in, whatever their count."""
    counts = torch.arange(97)
    ids = DraftVocabulary.from_counts(counts, 10, always=range(5)).target_ids.tolist()
    assert ids == [0, 1, 2, 3, 4, 92, 93, 94, 95, 96]


@pytest.mark.parametrize("size", [0, 2, 98])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(SettingError, match="draft vocabulary size"):
        DraftVocabulary.from_counts(torch.ones(97), size, always=[0, 1, 2])


def test_offsets_and_ids_are_inverse():
    ids = torch.tensor([2, 3, 11, 50])
    vocabulary = DraftVocabulary.from_files(ids - torch.arange(4), None, 60)
    assert torch.equal(vocabulary.target_ids, ids)
    draft = vocabulary.draft_ids()
    assert draft[ids].tolist() == [0, 1, 2, 3] and int((draft >= 0).sum()) == 4


def test_absolute_ids_where_offsets_belong_are_refused_when_out_of_range():
    """B68: a map that leaves the target vocabulary cannot be offsets."""
    with pytest.raises(CheckpointError, match=r"offsets|ascending"):
        DraftVocabulary.from_files(torch.tensor([2, 3, 11, 59]), None, 60)
