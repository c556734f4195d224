"""The loss is a sum over valid tokens."""

import torch

from titanlite.optim.loss import IGNORE_INDEX, cross_entropy_sum


def test_parts_add_up_to_the_whole() -> None:
    """Invariant 3, at its root: a batch split anywhere, with unequal masks, gives the same sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    labels[0, :5] = IGNORE_INDEX
    whole = cross_entropy_sum(logits, labels)
    parts = cross_entropy_sum(logits[:1], labels[:1]) + cross_entropy_sum(logits[1:], labels[1:])
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)  # fp32 inside
    kept = labels != IGNORE_INDEX
    by_hand = -logits.log_softmax(-1)[kept, labels[kept]].sum()
    torch.testing.assert_close(whole.double(), by_hand, rtol=1e-6, atol=0)


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(2, 500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.zeros(2, 500, dtype=torch.int64)
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy_sum(logits.float(), labels), rtol=0, atol=0)


def test_no_valid_label_is_a_loss_of_zero() -> None:
    assert cross_entropy_sum(torch.randn(1, 3, 5), torch.full((1, 3), IGNORE_INDEX)).item() == 0.0
