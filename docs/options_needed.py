"""Who needs an option, in English and in Chinese: a column of ``docs/*/options.md``."""

from typing import Dict, Tuple

NEEDED: Dict[str, Tuple[str, str]] = {
    'accelerator.backend': (
        "Jobs that must use another backend than the device's usual one, such as MPI.",
        '必须使用与设备常用后端不同的后端（如 MPI）的作业。',
    ),
    'accelerator.compilations': (
        'Jobs whose first compilation takes so long that the warning disturbs: `False`.',
        '第一次编译很久、不需要该警告的作业：`False`。',
    ),
    'accelerator.host_losses': (
        "Detectors of your own whose varying shapes `'auto'` does not find: `True`; losses "
        'of constant shapes, which may stay on the device: `False`.',
        "自己的检测器，其变化的形状 `'auto'` 找不到：`True`；形状不变、可以留在设备上的损失"
        '：`False`。',
    ),
    'accelerator.initial_weights': (
        "Comparisons with MMEngine alone on a device that is no CUDA card: `'device'`; of "
        "CUDA with other devices: `'host'`.",
        "在不是 CUDA 卡的设备上与只用 MMEngine 比较：`'device'`；CUDA 与其他设备比较：`'host'`。",
    ),
    'accelerator.memory': (
        'Jobs whose memory another tool logs: `False`.',
        '由其他工具记录内存的作业：`False`。',
    ),
    'accelerator.pad_to': (
        'Training on lazy devices with images of varying sizes, each of which compiles graphs.',
        '在惰性设备上用大小不一的图像训练，每种大小都要编译图。',
    ),
    'accelerator.preemption': (
        'Scripts that handle these signals themselves: `False`.',
        '自己处理这些信号的脚本：`False`。',
    ),
    'accelerator.resume_settings': (
        "Runs that resume with another learning rate or schedule: `'config'`.",
        "以不同的学习率或调度恢复的训练：`'config'`。",
    ),
    'model_parallel.enable': (
        'Models too large for one device, with adapters or whole.',
        '一个设备放不下的模型，无论带适配器还是完整训练。',
    ),
    'model_parallel.devices': (
        'Hosts where several processes, or other programs, share the devices.',
        '多个进程或其他程序共用设备的主机。',
    ),
    'model_parallel.strategy': (
        "Comparisons with accelerate's map: `'auto'`; its map as long as it is even: `'dynamic'`.",
        "与 accelerate 的映射比较：`'auto'`；只要均衡就用它的映射：`'dynamic'`。",
    ),
    'model_parallel.max_memory': (
        'Devices that other programs use, too, and plans for a machine that is not at hand.',
        '其他程序也使用的设备，以及为不在手边的机器做的计划。',
    ),
    'model_parallel.no_split': (
        'Models whose parts exchange tensors outside of their `forward`, so that no search '
        'finds them.',
        '各部分在 `forward` 之外交换张量、因而查找不到的模型。',
    ),
    'model_parallel.balance_threshold': (
        "Models of few, unequal blocks, whose best plan is above it; jobs with `'dynamic'`.",
        "块少而不等、最好的计划也高于该值的模型；使用 `'dynamic'` 的作业。",
    ),
    'model_parallel.force_balance': (
        'Jobs that must not start with an uneven plan: `True`; models of fewer blocks than '
        'devices: `False`.',
        '计划不均衡就不得开始的作业：`True`；块数少于设备数的模型：`False`。',
    ),
    'model_parallel.exclude_cpu': (
        'Models that do not fit on all devices together: `False`.',
        '所有设备加起来也放不下的模型：`False`。',
    ),
    'model_parallel.precision': (
        'Fine-tuning of large frozen models, whose float32 weights do not fit.',
        '微调冻结的大模型，其 float32 权重放不下。',
    ),
    'model_parallel.guard': (
        "Developers of a model who want to correct its source: `'error'`; jobs known to be "
        'without mistakes, to save the time: `None`.',
        "要改正源代码的模型开发者：`'error'`；确知没有错误、要节省时间的作业：`None`。",
    ),
    'model_parallel.check_r_consistency': (
        'LoRA training whose adapters are meant to have one rank: `True`.',
        '适配器的秩应当相同的 LoRA 训练：`True`。',
    ),
    'model_parallel.strict_r_check': (
        'The same, if such a job must not start: `True`.',
        '同上，而且这样的作业不得开始：`True`。',
    ),
    'model_parallel.plan': (
        'Jobs that have to be split alike each time, or by hand.',
        '每次都必须以同样方式或手工划分的作业。',
    ),
    'sharding.blocks': (
        'Models whose blocks are not found, or whose steps call parts in place of the model.',
        '查找不到块的模型，或其步骤调用各部分而不调用模型本身。',
    ),
    'sharding.ranks': (
        'Jobs on several hosts whose links are slower than those inside a host.',
        '多台主机的作业，主机之间的链路慢于主机内部。',
    ),
    'sharding.reshard_after_forward': (
        'Jobs with memory to spare over slow links: `False`.',
        '内存有余而链路慢的作业：`False`。',
    ),
    'sharding.mixed_precision': (
        'Cards with bfloat16 on which gathered blocks are too large, or messages too slow.',
        '支持 bfloat16 的卡，收集的块太大或消息太慢时。',
    ),
    'sharding.offload': (
        'Cards too small for their part of the weights and optimizer: `True`.',
        '放不下自己那一份权重和优化器的卡：`True`。',
    ),
    'sharding.sharded_checkpoint': (
        "Models whose whole checkpoint does not fit in the memory of rank 0's host: `True`.",
        '完整检查点在 rank 0 的主机内存中放不下的模型：`True`。',
    ),
    'model_wrapper_cfg.bucket_cap_mb': (
        'Jobs with a measured share of communication: larger for many ranks, smaller to '
        'overlap more.',
        '测量过通信占比的作业：rank 多时调大，要更多重叠时调小。',
    ),
    'model_wrapper_cfg.grad_compression': (
        "Jobs over slow links between hosts: `'bf16'`.",
        "主机之间链路慢的作业：`'bf16'`。",
    ),
    'model_wrapper_cfg.nonfinite_grads': (
        "Jobs over a vendor's backend that should end at the first NaN: `'stop'`; training "
        "that passes over bad steps itself: `'ignore'`.",
        "使用厂商后端、遇到第一个 NaN 就应结束的作业：`'stop'`；自己跳过坏步骤的训练："
        "`'ignore'`。",
    ),
    'default_hooks.checkpoint.async_save': (
        'Jobs that wait for saves: large models, slow or remote disks: `True`.',
        '等待保存的作业，如大模型、慢速或远程磁盘：`True`。',
    ),
    'default_hooks.checkpoint.resumable_best': (
        'Runs that continue from the best checkpoint: `True`.',
        '从最好的检查点继续的训练：`True`。',
    ),
}
