"""A small Llama with LoRA adapters, on the texts of Python's own ``help()``."""

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch import Tensor, nn

#: One piece of text in this many is for testing.
HELD_OUT = 10


@DATASETS.register_module()
class PythonHelpText(BaseDataset):
    """The texts of ``help('topics')``, which come with Python, in pieces of equal length.

    An item is ``dict(inputs=tokens)``: an int64 array of shape (length,), one token for each byte,
    so the vocabulary has 256 tokens. Python 3.11 has 465,000 bytes.

    Args:
        split (str): ``'train'``, or ``'test'``: every tenth piece.
        length (int): Bytes of a piece. Defaults to 64.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`; ``indices=100`` takes 100 pieces.
    """

    def __init__(self, split: str = 'train', length: int = 64, **kwargs: object) -> None:
        if split not in ('train', 'test'):
            raise ValueError(f"split={split!r}: expected 'train' or 'test'.")
        self.split, self.length = split, length
        super().__init__(**kwargs)

    def load_data_list(self) -> List[Dict[str, object]]:
        from pydoc_data.topics import topics

        text = '\n'.join(topics[name] for name in sorted(topics)).encode()
        count = len(text) // self.length
        pieces = np.frombuffer(text, np.uint8, count * self.length).reshape(count, self.length)
        for_test = np.arange(count) % HELD_OUT == 0
        chosen = for_test if self.split == 'test' else ~for_test
        return [dict(inputs=piece) for piece in pieces[chosen]]

    def prepare_data(self, idx: int) -> Dict[str, object]:
        return dict(inputs=self.get_data_info(idx)['inputs'].astype(np.int64))


@MODELS.register_module()
class LlamaForText(BaseModel):
    """A Llama with random weights, built from its configuration; nothing is downloaded.

    Args:
        config (dict): Arguments of ``transformers.LlamaConfig``.
        lora (dict, optional): Arguments of ``peft.LoraConfig``: then only the adapters and
            ``modules_to_save`` are trained. Defaults to None: all weights are.
        data_preprocessor (dict, optional): See BaseModel.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        lora: Optional[Mapping[str, Any]] = None,
        data_preprocessor: Optional[Dict] = None,
    ) -> None:
        super().__init__(data_preprocessor)
        from transformers import LlamaConfig, LlamaForCausalLM

        # Without a cache for generating, which training fills for nothing.
        self.llama: nn.Module = LlamaForCausalLM(LlamaConfig(**{'use_cache': False, **config}))
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            self.llama = get_peft_model(self.llama, LoraConfig(**lora))

    def init_weights(self) -> None:
        """Keep the weights: transformers' own method does not start adapters at zero."""

    def forward(
        self, inputs: Tensor, mode: str = 'tensor'
    ) -> Union[Tensor, Dict[str, Tensor], List[Dict[str, object]]]:
        """Predict every token of pieces of shape (N, T) from the tokens before it.

        Returns:
            For ``mode='loss'`` the losses; for ``'predict'`` the ``nats`` (negative log
            likelihood) and number of ``tokens`` of each piece; for ``'tensor'`` scores of shape
            (N, T, vocabulary).
        """
        scores = self.llama(input_ids=inputs).logits
        if mode == 'tensor':
            return scores
        # A model that is spread over devices has its scores on the device of its last layer. Only
        # one tensor is copied back: on a lazy device every copy is an execution.
        expected = inputs[:, 1:].to(scores.device)
        scores = scores[:, :-1].float().transpose(1, 2)
        nats = nn.functional.cross_entropy(scores, expected, reduction='none').to(inputs.device)
        if mode == 'loss':
            return dict(loss=nats.mean())
        return [dict(nats=each, tokens=nats.shape[1]) for each in nats.sum(dim=1).unbind()]


@METRICS.register_module()
class BitsPerByte(BaseMetric):
    """How many bits the model needs for a byte: 8 before training."""

    def process(self, data_batch: object, data_samples: Sequence[Mapping[str, Any]]) -> None:
        nats = torch.stack([sample['nats'] for sample in data_samples]).sum()
        self.results.append((float(nats), sum(sample['tokens'] for sample in data_samples)))

    def compute_metrics(self, results: List[Tuple[float, int]]) -> Dict[str, float]:
        nats, tokens = (sum(column) for column in zip(*results))
        return dict(bits_per_byte=nats / tokens / math.log(2))
