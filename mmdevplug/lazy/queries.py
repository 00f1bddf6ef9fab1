"""Make the denoising queries of DINO and its kin on the host, always the same number of them.

There are queries for each box, so each number of boxes would be a graph of the decoder. Queries of
zeros are put before the others. No other query attends to them, and the loss does not see them.
"""

import copy
from typing import Any, Tuple

from torch import Tensor, nn
from torch.nn import functional

from mmdevplug.accelerators import rank_context


def make_queries_on_host(model: nn.Module, truth: Any) -> None:
    """Let the detectors in a model make denoising queries on the host.

    Args:
        model (nn.Module): A bare model for a lazy device, changed in place.
        truth (HostTruth): The originals of its samples.
    """
    for part in model.modules():
        generator = getattr(part, 'dn_query_generator', None)
        head: object = getattr(part, 'bbox_head', None)
        embedding = getattr(generator, 'label_embedding', None)
        if not isinstance(embedding, nn.Embedding) or not hasattr(head, 'split_outputs'):
            continue
        kind = type(generator)

        def call(self: object, samples: object, kind: type = kind) -> Tuple[object, ...]:
            return _padded_queries(self, kind, truth.of(samples))

        # PyTorch would call `forward`, which these modules do not have.
        generator.__class__ = type(kind.__name__, (kind,), {'__call__': call})
        head.split_outputs = _WithoutPadding(head)


def _padded_queries(generator: Any, kind: type, samples: Any) -> Tuple[Any, ...]:
    """Make queries with rows of zeros and ones for labels, which the device embeds."""
    embedding = generator.label_embedding
    classes = embedding.num_embeddings
    host = copy.copy(generator)
    vars(host).update(_modules={}, embed_dims=classes)
    host.label_embedding = lambda labels: functional.one_hot(labels, classes).float()
    labels, boxes, mask, meta = kind.__call__(host, samples)
    step = 2 * getattr(generator, 'num_dn_queries', 50)
    missing = max(-(-labels.shape[1] // step), 1) * step - labels.shape[1]
    labels, boxes = (functional.pad(each, (0, 0, missing, 0)) for each in (labels, boxes))
    mask = functional.pad(mask, (missing, 0, missing, 0), value=True)
    mask[:missing, :missing] = False  # a row that attends to nothing would be NaN
    queries = [labels.argmax(-1), labels.sum(-1, keepdim=True), boxes, mask]
    labels, given, boxes, mask = rank_context().accelerator.copies.to_device(
        queries, embedding.weight.device
    )
    return embedding(labels) * given, boxes, mask, dict(meta, num_padding_queries=missing)


class _WithoutPadding:
    """Replace ``split_outputs`` of a head: outputs of the padding are cut off."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def __call__(self, scores: Tensor, boxes: Tensor, meta: Any) -> Any:
        start = (meta or {}).get('num_padding_queries', 0)
        return type(self.head).split_outputs(scores[:, :, start:], boxes[:, :, start:], meta)
