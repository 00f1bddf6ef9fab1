#!/usr/bin/env bash
# pycocotools 2.0.11: an annotation whose id is 0 is never found. COCOeval notes the id of the annotation that a
# detection matches, and takes 0 for "none": the perfect detection counts as a false one, and AP of two images falls from
# 1.0 to 0.25, without a word. COCO's format says that ids are integers; converters that count from 0 are common.
# mmdet's CocoMetric evaluates so with `ann_file`; what it makes from a data set itself counts from 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q pycocotools==2.0.11 numpy
cat >"$folder/show.py" <<'P'
import contextlib
import io
import sys
from importlib import metadata

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

BOX = [10, 10, 20, 20]


def average_precision(first, images):
    truth = COCO()
    truth.dataset = dict(
        images=[dict(id=image, width=64, height=64) for image in range(images)],
        categories=[dict(id=1, name='thing')],
        annotations=[
            dict(id=first + image, image_id=image, category_id=1, bbox=BOX, area=400, iscrowd=0)
            for image in range(images)
        ],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found = truth.loadRes(
            [dict(image_id=image, category_id=1, bbox=BOX, score=0.9) for image in range(images)]
        )
        evaluation = COCOeval(truth, found, 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return round(float(evaluation.stats[0]), 3)


print('pycocotools', metadata.version('pycocotools'))
from_one = [average_precision(1, images) for images in (1, 2)]
from_zero = [average_precision(0, images) for images in (1, 2)]
print('AP of perfect detections in 1 and 2 images, ids from 1:', from_one)
print('ids from 0:', from_zero)
sys.exit(not (from_one == [1.0, 1.0] and from_zero == [0.0, 0.252]))
P
"$folder/env/bin/python" "$folder/show.py"
