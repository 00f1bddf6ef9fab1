"""Draw the pictures of how_it_works.md: ``python docs/drawings/draw.py`` writes docs/images."""

import sys
from pathlib import Path
from typing import Callable, Dict

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import PALE, Drawing  # noqa: E402

IMAGES = Path(__file__).resolve().parents[1] / 'images'
LANGUAGES = ('en', 'zh_cn')

#: Chooses between English and Chinese.
Say = Callable[[str, str], str]


def layers(say: Say) -> Drawing:
    """Which part of the package stands on which."""
    d = Drawing(860, 470)
    config = say('your config, and scripts of OpenMMLab', '您的配置，以及 OpenMMLab 的脚本')
    d.box(40, 20, 780, 46, 'theirs', config)
    d.arrow(430, 66, 430, 92)
    d.box(
        40,
        94,
        780,
        46,
        'theirs',
        'MMEngine',
        say('Runner, hooks, registries', 'Runner、钩子、注册器'),
    )
    d.arrow(430, 140, 430, 172, say('is built by its registry', '由注册器构建'))
    d.frame(40, 174, 780, 218, 'mmdevplug')
    d.box(60, 200, 740, 44, 'ours', 'runner', say('where the parts meet', '各部分在此汇合'))
    parts = (
        ('hooks', say('memory, time,\nsignals', '内存、时间、\n信号')),
        ('gradients,\nmodel', say('wrapper, averaging,\nsync BN', '模型封装、梯度、\n同步 BN')),
        ('optim', say('updates,\nmixed precision', '更新、\n混合精度')),
        ('model_parallel,\nsharding', say('larger than\none device', '大于一个设备\n的模型')),
        ('checkpoint,\ndata', say('continued in the\nmiddle of an epoch', '从 epoch\n中间继续')),
    )
    for number, (name, words) in enumerate(parts):
        d.box(60 + number * 150, 252, 140, 66, 'ours', name, words, 13)
    names = say('process group, host staging, samples', '进程组、经主机中转、样本')
    d.box(60, 326, 360, 54, 'ours', 'distributed, staged, samples', names)
    names = say('one small class for each family', '每一类设备一个小的类')
    d.box(440, 326, 360, 54, 'ours', 'accelerators', names)
    d.arrow(240, 380, 240, 416)
    d.arrow(620, 380, 620, 416)
    d.box(60, 418, 360, 40, 'theirs', 'torch.distributed, gloo')
    d.box(
        440, 418, 360, 40, 'theirs', say("PyTorch and the vendor's package", 'PyTorch 与厂商的包')
    )
    return d


def iteration(say: Say) -> Drawing:
    """An iteration of a lazy device."""
    d = Drawing(900, 330)
    d.text(16, 70, say('host', '主机'), 14, PALE, 'start', True)
    d.text(16, 250, say('device', '设备'), 14, PALE, 'start', True)
    record = say('forward, loss,\nbackward', '前向、损失、\n反向')
    d.box(90, 40, 140, 60, 'host', say('record', '记录'), record)
    d.box(
        130,
        220,
        160,
        60,
        'device',
        say('execution 1', '第 1 次执行'),
        say('gradients, loss', '梯度、损失'),
    )
    d.arrow(185, 100, 200, 218, say('materialize', '触发执行'))
    d.box(
        345,
        40,
        150,
        60,
        'host',
        say('average', '平均'),
        say('with the other ranks', '与其他 rank 一起'),
    )
    d.arrow(290, 240, 385, 102, say('one call\nfetches', '一次调用\n取回'), right=26)
    d.box(
        550,
        40,
        150,
        60,
        'host',
        say('record', '记录'),
        say('clip, update,\nEMA', '裁剪、更新、\nEMA'),
    )
    d.arrow(495, 70, 548, 70)
    d.arrow(440, 102, 560, 230, say('one call\nsends', '一次调用\n送回'), right=18)
    update = say('weights, what the log shows', '权重、日志所需的值')
    d.box(562, 220, 200, 60, 'device', say('execution 2', '第 2 次执行'), update)
    d.arrow(640, 100, 655, 218, say('materialize', '触发执行'))
    d.arrow(762, 250, 880, 250, say('next iteration', '下一次迭代'), place='above')
    note = say(
        'After the first iterations nothing is compiled: both graphs are the same every time.',
        '最初几次迭代之后不再编译：每次迭代的两个图都一样。',
    )
    d.text(450, 310, note, 13, PALE)
    return d


def staging(say: Say) -> Drawing:
    """How gradients are averaged where the backend refuses the device's tensors."""
    d = Drawing(860, 385)
    for host in (0, 1):
        x = 20 + host * 430
        d.frame(x, 14, 390, 232, say(f'host {host}', f'主机 {host}'))
        for local in (0, 1):
            left = x + 20 + local * 190
            rank = host * 2 + local
            bucket = say('a bucket of gradients', '一桶梯度')
            d.box(
                left,
                46,
                160,
                56,
                'device',
                say(f'device of rank {rank}', f'rank {rank} 的设备'),
                bucket,
            )
            d.arrow(left + 60, 102, left + 60, 160, '1')
            d.arrow(left + 118, 160, left + 118, 102, '4')
        shared = say(
            '2  the ranks of a host add up here,\nwithout sockets',
            '2  同一主机的各 rank 在此相加，\n不经过套接字',
        )
        d.box(x + 20, 162, 350, 68, 'host', say('shared memory', '共享内存'), shared)
    d.arrow(215, 230, 215, 288)
    d.arrow(645, 230, 645, 288)
    d.arrow(245, 290, 245, 232)
    d.arrow(615, 290, 615, 232)
    gloo = say(
        '3  one sum of each host travels and is averaged', '3  每台主机只传输一份和，并求平均'
    )
    d.box(120, 290, 620, 50, 'host', 'gloo', gloo)
    note = say(
        '1  copied to the host;  4  the average is copied back', '1  拷到主机；4  平均值拷回设备'
    )
    d.text(430, 366, note, 13, PALE)
    return d


def failure(say: Say) -> Drawing:
    """How all ranks learn that one failed."""
    d = Drawing(860, 380)
    d.box(
        300,
        20,
        260,
        56,
        'host',
        say('store', 'store'),
        say('of torch.distributed, on one host', 'torch.distributed 的，在一台主机上'),
    )
    beats = (
        say('beats every 2 s:\n"iteration 31"', '每 2 秒心跳：\n“iteration 31”'),
        say('beats every 2 s:\n"iteration 31"', '每 2 秒心跳：\n“iteration 31”'),
        say('leaves a report:\n"ValueError in loss()"', '留下报告：\n“loss() 中 ValueError”'),
        say('no beat any more', '不再有心跳'),
    )
    names = (
        'rank 0',
        'rank 1',
        say('rank 2 fails', 'rank 2 出错'),
        say('or: rank 3 is gone', '或：rank 3 消失'),
    )
    for number, (name, words) in enumerate(zip(names, beats)):
        left = 20 + number * 210
        d.box(left, 150, 190, 72, 'bad' if number > 1 else 'host', name, words)
        if number < 3:
            d.arrow(left + 95, 150, 350 + number * 80, 78)
    d.line(745, 150, 560, 60)
    d.arrow(430, 222, 430, 268)
    d.text(
        440,
        245,
        say('a thread of every other rank reads it', '其他每个 rank 的一个线程读到它'),
        12,
        PALE,
        'start',
    )
    message = say(
        'all ranks end with one message:\nwhich rank, on which host, what it did, and what to do',
        '所有 rank 以同一条消息结束：\n哪个 rank、在哪台主机、当时在做什么，以及该怎么办',
    )
    d.box(150, 270, 560, 68, 'ours', '', message, 15)
    d.text(
        430,
        362,
        say(
            'A rank of another host is given up after 60 s without a beat.',
            '其他主机上的 rank 60 秒没有心跳即被放弃。',
        ),
        12,
        PALE,
    )
    return d


DRAWINGS: Dict[str, Callable[[Say], Drawing]] = dict(
    layers=layers, iteration=iteration, staging=staging, failure=failure
)


def render(name: str, language: str) -> str:
    """The SVG text of one drawing.

    Args:
        name (str): A key of ``DRAWINGS``.
        language (str): ``'en'`` or ``'zh_cn'``.
    """
    return DRAWINGS[name](lambda en, zh: en if language == 'en' else zh).render()


def main() -> None:
    """Write all drawings in both languages."""
    for name in DRAWINGS:
        for language in LANGUAGES:
            target = IMAGES / f'{name}.{language}.svg'
            target.write_text(render(name, language), encoding='utf-8')


if __name__ == '__main__':
    main()
