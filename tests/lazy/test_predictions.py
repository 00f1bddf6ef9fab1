"""Which methods of a model are called on the host."""

import copy

import pytest
from torch import nn

from mmdevplug.lazy.predictions import FinishedOnHost, finish_on_host


class Head(nn.Module):
    def predict_by_feat(self, scores, factor=1):
        return [self, scores * factor]


class SecondHead(Head):
    def predict(self, x, rpn_results_list):
        return rpn_results_list


class Detector(nn.Module):
    """A detector, with heads of these names; second heads get the boxes of the others."""

    def __init__(self, *heads):
        super().__init__()
        for name in heads:
            setattr(self, name, SecondHead() if 'roi' in name or 'mask' in name else Head())

    def extract_feat(self, inputs):
        return inputs


class Trained(nn.Module):
    """What else has a head of this name: a second stage."""

    def __init__(self):
        super().__init__()
        self.bbox_head = Head()


@pytest.mark.parametrize(
    ('model', 'replaced'),
    [
        (Detector('bbox_head'), True),
        (nn.Sequential(Detector('bbox_head')), True),
        (Detector('bbox_head', 'roi_head'), False),
        (Detector('bbox_head', 'mask_head'), False),
        (Detector('mask_head'), True),
        (Detector('pts_bbox_head'), True),
        (Detector('any'), True),
        (Detector('rpn_head', 'pts_roi_head'), False),
        (Trained(), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_heads_whose_boxes_go_nowhere_are_called_on_the_host(model, replaced):
    finish_on_host(model, lambda: True)
    kinds = [type(vars(part).get('predict_by_feat')) for part in model.modules()]
    assert (FinishedOnHost in kinds) == replaced


@pytest.mark.parametrize('predicts', [True, False])
def test_a_copy_of_a_model_calls_its_own_methods(predicts):
    model = Detector('bbox_head')
    finish_on_host(model, lambda: predicts)
    finish_on_host(model, lambda: not predicts)  # the first remains
    other = copy.deepcopy(model)
    assert other.bbox_head.predict_by_feat(2, factor=3) == [other.bbox_head, 6]
    assert model.bbox_head.predict_by_feat(2) == [model.bbox_head, 2]


def test_what_a_spread_model_does_before_a_method_is_left_out_of_predictions():
    def align(scores):
        return f'aligned {scores}'

    model = Detector('bbox_head')
    model.bbox_head.predict_by_feat = align
    predicting = []
    finish_on_host(model, lambda: bool(predicting))
    assert model.bbox_head.predict_by_feat(1) == 'aligned 1'
    predicting.append(True)
    assert model.bbox_head.predict_by_feat(1) == [model.bbox_head, 1]
