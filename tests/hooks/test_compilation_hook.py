"""What the warning of compilations advises."""

from mmdevplug.data.batch_shapes import COMPUTED, SENT
from mmdevplug.hooks.compilation_hook import CompilationHook


def explain(sent, computed):
    """The advice where images were of one size in an iteration and of another in the next."""
    hook = CompilationHook()
    hook._recorder, hook._sizes = None, {(480, 480), (640, 640), (800, 800)}
    before, after = (
        {
            SENT: {'inputs[*]': ((3, *one), (3, *one))},
            COMPUTED: {'inputs': ((2, 3, *other),)},
        }
        for one, other in zip(sent, computed)
    )
    return ' '.join(hook._explain(9, before, after))


def test_sizes_that_the_preprocessor_chooses():
    told = explain([(640, 640), (640, 640)], [(480, 480), (800, 800)])
    assert 'The images were all of (640, 640)' in told
    assert 'to 3 sizes so far' in told
    assert 'BatchSyncRandomResize with size_divisor=160' in told
    assert 'pad_to' not in told


def test_sizes_that_come_with_the_images():
    told = explain([(480, 480), (800, 800)], [(480, 480), (800, 800)])
    assert 'accelerator=dict(pad_to=' in told
    assert 'BatchSyncRandomResize' not in told
