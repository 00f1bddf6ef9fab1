"""How many graphs torch_xla has executed and compiled, in all and in each iteration."""

from mmengine.hooks import Hook


def counts():
    """Executions that have ended and compilations so far."""
    import torch_xla.core.xla_model as xm
    from torch_xla.debug import metrics

    xm.wait_device_ops()  # executions are counted when they end
    # The second is of graphs that are divided among chips.
    names = ('ExecuteTime', 'ExecuteReplicatedTime', 'CompileTime')
    one, all_chips, compiled = ((metrics.metric_data(name) or [0])[0] for name in names)
    return one + all_chips, compiled


class Counts(Hook):
    """Notes :func:`counts` at the end of each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.counted = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.counted.append(counts())


def train_counted(runner):
    """Train; return :func:`counts` after each iteration."""
    hook = Counts()
    runner.register_hook(hook)
    runner.train()
    return hook.counted


def differences(numbers):
    """From each number to the next one."""
    return [after - before for before, after in zip(numbers, numbers[1:])]


def cost_of(counted):
    """Executions of each iteration after the first that is given, and compilations in all."""
    executions, compilations = zip(*counted)
    return differences(executions), compilations[-1] - compilations[0]
