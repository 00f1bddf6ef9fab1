"""Named like Sophgo's package, whose device type is TorchTPU's too, for tests: see native_card."""

import native_card

tpu = native_card.install(native_card.TPU._replace(backend='sccl', product='Sophgo'))
