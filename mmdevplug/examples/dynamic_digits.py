"""A classifier that learns from rewards for its own answers, as language models do."""

from typing import Dict, List, Optional, Union

import torch
from mmengine.registry import MODELS
from torch import Tensor

from mmdevplug.accelerators import to_device

from .digits import DigitsClassifier


@MODELS.register_module()
class DigitsPolicy(DigitsClassifier):
    """Answer several times which digit an image shows, and learn which answers were right.

    A group is an image with several answers, each with its reward: 1 for the right digit, 0 for
    any other. A group whose answers are all right, or all wrong, teaches nothing.

    Args:
        answers (int): Answers to each image, the size of a group. Defaults to 8.
        exploration (float): The share of random answers, so that every digit is answered
            sometimes. Defaults to 0.02.
        **kwargs: See :class:`mmdevplug.examples.digits.DigitsClassifier`.
    """

    def __init__(self, answers: int = 8, exploration: float = 0.02, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.answers, self.exploration = answers, exploration

    def generate_samples(self, data: Dict[str, Tensor]) -> List[Dict[str, Tensor]]:
        """Answer each image several times; a sample has ``inputs``, ``answers``, ``rewards``."""
        inputs, labels = data['inputs'], data['labels']
        chances = super().forward(inputs).softmax(dim=1)
        chances = (1 - self.exploration) * chances + self.exploration / chances.shape[1]
        scores = chances.log().unsqueeze(1).expand(-1, self.answers, -1)
        # The Gumbel-max trick: sampling with operations that every device has.
        noise = -torch.log(-torch.log(torch.rand_like(scores).clamp(1e-9, 1 - 1e-7)))
        answers = (scores + noise).argmax(dim=2)
        rewards = (answers == labels.unsqueeze(1)).float()
        # Copied to the host before it is split.
        made = to_device(dict(inputs=inputs, answers=answers, rewards=rewards), 'cpu')
        return [
            dict(inputs=image, answers=answer, rewards=reward)
            for image, answers, rewards in zip(*made.values())
            for answer, reward in zip(answers.unbind(), rewards.unbind())
        ]

    def is_valid_group(self, group: List[Dict[str, Tensor]]) -> bool:
        """Whether some answers to an image are right and some are wrong."""
        return 0 < sum(float(sample['rewards']) for sample in group) < len(group)

    def forward(
        self,
        inputs: Tensor,
        labels: Optional[Tensor] = None,
        answers: Optional[Tensor] = None,
        rewards: Optional[Tensor] = None,
        mode: str = 'tensor',
    ) -> Union[Tensor, Dict[str, Tensor], List[Dict[str, Tensor]]]:
        """Learn from answers and rewards of shape (N,), in whole groups, or classify.

        For ``mode='loss'`` there is an image for each answer; for other modes see
        :class:`mmdevplug.examples.digits.DigitsClassifier`.
        """
        if mode != 'loss':
            return super().forward(inputs, labels, mode)
        answers, rewards = (value.view(-1, self.answers) for value in (answers, rewards))
        # The answers of a group are to the same image.
        log_p = super().forward(inputs[:: self.answers]).log_softmax(dim=1).gather(1, answers)
        mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
        # Only answers better than the mean: with negative advantages too, the model becomes so
        # sure of some digits that it never answers others.
        advantage = ((rewards - mean) / (std + 1e-6)).clamp(min=0)
        return dict(loss=-(advantage * log_p).mean())
