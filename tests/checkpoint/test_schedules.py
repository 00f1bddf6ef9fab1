"""Schedules with attributes that are no state."""

from mmengine.logging import MessageHub
from mmengine.optim import ConstantLR
from mmengine.registry import PARAM_SCHEDULERS

from mmdevplug.runner import DeviceRunner
from tests.jobs import digits_config


@PARAM_SCHEDULERS.register_module()
class ReadsAHub(ConstantLR):
    """Reads what a hook writes into a hub, as mmagic's ReduceLR."""

    def __init__(self, *args, **kwargs):
        self.hub = MessageHub.get_instance('of a schedule')
        super().__init__(*args, **kwargs)


def train(work_dir, epochs, **options):
    cfg = digits_config('cpu', work_dir, train_cfg__val_interval=9, **options)
    cfg.param_scheduler = dict(type='ReadsAHub', begin=0, end=9)
    cfg.train_cfg.max_epochs = epochs
    runner = DeviceRunner.from_cfg(cfg)
    runner.train()
    return runner


def test_a_schedule_that_reads_a_message_hub_resumes(tmp_path):
    train(tmp_path, 1)
    runner = train(tmp_path, 2, resume=True)
    (schedule,) = runner.param_schedulers
    assert schedule.last_step == runner.epoch == 2
    assert schedule.hub is MessageHub.get_instance('of a schedule')
