#!/usr/bin/env bash
# Run the tests for the CPU on several releases of PyTorch, each in an environment of its own, and
# append a line of JSON for each run to $COMPAT_RESULTS/<torch>-<mmengine>.jsonl (work_dirs/compat).
#
#   tools/compat.sh                       # every combination below
#   tools/compat.sh 1.13.1 2.6.0          # those with these releases of torch
#   tools/compat.sh 2.1.2-0.10.0          # the one with these releases of torch and MMEngine
#   tools/compat.sh 2.13.0-onedl-0.10.12  # the one with OneDL's MMEngine
#   TESTS="tests/gradients tests/model" tools/compat.sh 2.1.2     # some of the tests
#   tools/compat.sh openmmlab             # a model of each further library of OpenMMLab
#
# The last one compiles mmcv (15 minutes), unless MMCV names a
# wheel of mmcv 2.1.0 for torch 2.13.0.
#
# An environment takes 3 to 9 GB, in $COMPAT_ENVS (default: a temporary folder), and is deleted after
# its run unless KEEP=1; one that is there already is used. Pythons are looked for in $PYTHONS, a list
# of folders with a bin/python3.x each (default: those of pyenv), then in PATH.
set -uo pipefail
cd "$(dirname "$0")/.."

# torch | Python | MMEngine | what suits this release of torch
COMBINATIONS='
1.10.0 | 3.8  | 0.10.7 | numpy<2 opencv-python<4.12 accelerate==1.0.1 transformers==4.33.3
1.13.1 | 3.10 | 0.10.7 | numpy<2 opencv-python<4.12 accelerate==1.0.1 transformers==4.46.3 peft==0.13.2
2.1.2  | 3.9  | 0.10.7 | numpy<2 opencv-python<4.12 accelerate<1.7 transformers<4.50 peft<0.15
2.4.1  | 3.11 | 0.10.7 | numpy<2 opencv-python<4.12 accelerate transformers<5 peft<0.18
2.6.0  | 3.12 | 0.10.7 | accelerate transformers peft
2.9.0  | 3.11 | 0.10.7 | accelerate transformers peft
2.13.0 | 3.11 | 0.10.7 | accelerate transformers peft torchdata
2.14.1 | 3.11 | 0.10.7 | accelerate transformers peft torchdata
2.15.0 | 3.13 | 0.10.7 | accelerate transformers peft torchdata
2.1.2  | 3.9  | 0.10.0 | numpy<2 opencv-python<4.12 accelerate<1.7 transformers<4.50 peft<0.15
2.13.0 | 3.11 | 0.11.0rc0     | accelerate transformers peft torchdata
2.13.0 | 3.11 | onedl-0.10.12 | accelerate transformers peft torchdata
'
# mmcv without its operations: those are compiled for one release of torch each.
COMMON='ftfy scikit-learn psutil rich matplotlib safetensors tensorboard ninja pytest
pytest-timeout pytest-xdist hypothesis expecttest'
# OpenMMLab's packages, and those of OneDL that install the same modules.
OPENMMLAB='mmcv-lite==2.1.0 mmsegmentation==1.2.2 mmdet==3.3.0'
ONEDL='onedl-mmcv==2.3.6 onedl-mmsegmentation==1.4.2 onedl-mmdetection==3.5.1'

# Further libraries of OpenMMLab, with what lets them be imported today. torch===2.13.0 is the build
# that torchvision 0.28.0 is for, wherever pip prefers another one. NumPy 1: xtcocotools is compiled
# for it, and imgaug needs it. diffusers, transformers: mmagic and mmpretrain import what later
# releases do not have. albumentations: mmagic imports it without asking for it. mmaction2 1.1.0: the
# wheel of 1.2.0 lacks a package that it imports.
MORE='torch===2.13.0 torchvision==0.28.0 mmengine==0.10.7 mmdet==3.3.0 mmsegmentation==1.2.2
numpy==1.26.4 opencv-python==4.11.0.86 opencv-contrib-python==4.11.0.86 mmpretrain==1.2.0
mmdet3d==1.4.0 mmagic==1.2.0 albumentations==1.3.1 diffusers==0.24.0 transformers==4.46.3
huggingface_hub==0.25.2 peft==0.13.2 accelerate mmaction2==1.1.0 mmocr==1.0.1 xtcocotools
json_tricks munkres'
# Without what they ask for: mmpose for chumpy, which does not build and is not used.
MORE_ALONE='mmpose==1.3.2 mmrotate==1.0.0rc1 e2cnn==0.2.3 mmyolo==0.6.0'

TESTS=${TESTS:-tests}
ENVS=${COMPAT_ENVS:-$(mktemp -d)}
RESULTS=${COMPAT_RESULTS:-$PWD/work_dirs/compat}
mkdir -p "$RESULTS"
PYTHONS=${PYTHONS:-$(echo "$HOME"/.pyenv/versions/*/bin)}

python_of() {
    local folder
    for folder in $PYTHONS; do
        [ -x "$folder/python$1" ] && echo "$folder/python$1" && return
    done
    command -v "python$1"
}

# The package is linked, for read_base() as well; see the Makefile.
make_environment() {
    local python=$1/bin/python
    "$(python_of "$2")" -m venv "$1" &&
        "$python" -m pip install -q --upgrade pip 'setuptools<81' wheel &&
        "$python" -m pip install -q $3 $COMMON &&
        "$python" -m pip install -q --no-deps --no-build-isolation -e . &&
        ln -sfn "$PWD/mmdevplug" "$("$python" -c \
            'import sysconfig; print(sysconfig.get_paths()["purelib"])')/mmdevplug" &&
        touch "$1/.complete"
}

# These refuse mmcv 2.1.0 or mmdet 3.3.0 by number alone, and mmrotate imports a name that Python 3.10
# removed: three lines to edit in what is installed.
make_openmmlab() {
    local python=$1/bin/python
    make_environment "$1" 3.11 "$MORE" && rm "$1/.complete" || return 1
    MMCV_WITH_OPS=1 "$python" -m pip install -q --no-build-isolation "${MMCV:-mmcv==2.1.0}" &&
        "$python" -m pip install -q --no-deps $MORE_ALONE || return 1
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    sed -i -E "s/^(mmcv|mmdet)_maximum_version = .*/\1_maximum_version = '4.0.0'/" \
        "$site"/{mmaction,mmocr,mmrotate,mmyolo}/__init__.py &&
        sed -i 's/^from collections import Sequence/from collections.abc import Sequence/' \
            "$site"/mmrotate/models/detectors/refine_single_stage.py &&
        rm -rf "$site"/{mmaction,mmocr,mmrotate,mmyolo}/__pycache__ &&
        touch "$1/.complete"
}

if [ "${1:-}" = openmmlab ]; then
    environment=$ENVS/openmmlab
    set -f
    [ -e "$environment/.complete" ] || make_openmmlab "$environment" ||
        { echo 'compat: no environment for openmmlab' >&2; exit 1; }
    OMP_NUM_THREADS=1 PATH=$environment/bin:$PATH \
        "$environment/bin/python" -m pytest -q -m long tests/repos/test_more_of_openmmlab.py
    status=$?
    [ "${KEEP:-0}" = 1 ] || rm -rf "$environment"
    exit $status
fi

status=0
while IFS='|' read -r torch python mmengine suits <&3; do
    torch=${torch// /} python=${python// /} mmengine=${mmengine// /}
    [ -z "$torch" ] && continue
    name=$torch-$mmengine environment=$ENVS/$torch-$mmengine
    [ $# -gt 0 ] && [[ " $* " != *" $torch "* && " $* " != *" $name "* ]] && continue
    if [ ! -e "$environment/.complete" ]; then
        set -f  # no file is meant by < or *
        case $mmengine in
            onedl-*) libraries="onedl-mmengine==${mmengine#onedl-} $ONEDL" ;;
            *) libraries="mmengine==$mmengine $OPENMMLAB" ;;
        esac
        make_environment "$environment" "$python" "torch==$torch $libraries $suits" ||
            { echo "compat: no environment for $name" >&2; status=1; rm -rf "$environment"; continue; }
        set +f
    fi
    echo "compat: $name" >&2
    MMDEVPLUG_COMPAT=$RESULTS/$name.jsonl PYTHONPATH=tools OMP_NUM_THREADS=1 \
        "$environment/bin/python" -m pytest -q -p compat_report -n "${WORKERS:-2}" --dist loadfile \
        -m 'not cuda and not xla and not tpu and not opencl and not long' $TESTS || status=1
    [ "${KEEP:-0}" = 1 ] || rm -rf "$environment"
done 3<<<"$COMBINATIONS"
exit $status
