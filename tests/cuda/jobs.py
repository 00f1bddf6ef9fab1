"""What ranks do in the tests of GPUs; the stand-in of a native backend runs the same."""

import torch
from torch import distributed as torch_dist

from tests.jobs import install_card, start, weights_of


def first_weights(accelerator, work_dir):
    """Where weights are drawn, and which, by our runner with each choice and by MMEngine's."""
    from mmengine.registry import MODELS
    from mmengine.runner import Runner

    from mmdevplug.runner import DeviceRunner
    from tests.features.parts import FeatureNet
    from tests.features.rows import row_config

    @MODELS.register_module(force=True)
    class Placed(FeatureNet):
        def init_weights(self):
            self.drawn_on = self.head.weight.device.type
            super().init_weights()

    install_card(accelerator)
    found = {}
    for place in ('auto', 'host', 'device', 'mmengine'):
        cfg = row_config('sgd', accelerator, work_dir)
        cfg.model = dict(type='Placed')
        cfg.optim_wrapper.optimizer.lr = 0.0
        cfg.experiment_name = place
        cfg.accelerator.initial_weights = 'auto' if place == 'mmengine' else place
        runner = (Runner if place == 'mmengine' else DeviceRunner).from_cfg(cfg)
        runner.train()
        found[place] = runner.model.drawn_on, weights_of(runner.model)
    return found


def page_locked(accelerator):
    """Train where gradients pass through page-locked memory of the host.

    A GPU stands for an eager device whose tensors gloo does not take.
    """
    from torch import distributed as torch_dist

    import mmdevplug.staged  # noqa: F401
    from mmdevplug import DeviceDistributedDataParallel, init_device
    from mmdevplug.accelerators.torch_native import TorchNativeAccelerator
    from mmdevplug.staged.host_buffers import pins_memory
    from tests.gradients.averaging import batch, net

    install_card(accelerator)
    device = TorchNativeAccelerator(type=accelerator)
    context = init_device('pytorch', device, forced_backend='gloo', timeout=60)
    wrapper = DeviceDistributedDataParallel(
        net(64),
        accelerator=device,
        broadcast_buffers=False,
        bucket_cap_mb=0.01,
        process_group=torch_dist.new_group(backend='staged'),
    )
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        wrapper(batch(step, context.device, 64)).square().mean().backward()
        optimizer.step()
    return dict(
        weights=weights_of(wrapper.module),
        locked=pins_memory(context.device.type),
        device=str(next(wrapper.parameters()).device),
    )


def carry_objects(accelerator):
    """Objects and sums by MMEngine's own functions, and by PyTorch's."""
    from mmengine import dist

    from mmdevplug import patch_mmengine

    start(accelerator)
    patch_mmengine()
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    by_torch = [None] * size
    torch_dist.all_gather_object(by_torch, dict(of=rank))
    sent = [dict(of=rank)]
    dist.broadcast_object_list(sent)
    total = torch.ones(1)
    dist.all_reduce(total)
    return dict(
        by_torch=by_torch,
        gathered=dist.all_gather_object(rank),
        sent=sent,
        cpu=dist.collect_results([rank], size, device='cpu'),
        gpu=dist.collect_results([rank], size, device='gpu'),
        total=float(total),
    )


def infer(accelerator):
    """What an inferencer predicts on a device, and the same model on the host."""
    from mmengine.model import revert_sync_batchnorm

    from docs.sites.parts import SiteInferencer, SiteNet
    from mmdevplug import patch_mmengine

    install_card(accelerator)
    patch_mmengine(accelerator)
    torch.manual_seed(0)
    on_host = revert_sync_batchnorm(SiteNet()).eval()
    cfg = dict(model=dict(type='SiteNet'), test_dataloader=dict(collate_fn='default_collate'))
    inferencer = SiteInferencer(cfg, show_progress=False)
    inferencer.model.load_state_dict(on_host.state_dict())
    inputs = list(torch.linspace(-1, 1, 24).reshape(4, 6))
    scores = torch.tensor(inferencer(inputs, batch_size=4)['predictions'])
    with torch.no_grad():
        expected = on_host(torch.stack(inputs))
    device = str(next(inferencer.model.parameters()).device)
    return device, float((scores - expected).abs().max())
