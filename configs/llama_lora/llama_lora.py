# LoRA on a small Llama with random weights, over single bytes; knows nothing of devices.
custom_imports = dict(imports=['mmdevplug.examples.llama'], allow_failed_imports=False)
default_scope = 'mmengine'

model = dict(
    type='LlamaForText',
    config=dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        # PyTorch's fused attention refuses mixed precision on some devices.
        attn_implementation='eager',
        # Larger than usual: what is frozen at random has to pass something on.
        initializer_range=0.06,
    ),
    lora=dict(
        r=8,
        lora_alpha=16,
        target_modules=[
            'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj',
        ],
        # Nothing is pretrained here, so the embedding and the head have to be learnt, too.
        modules_to_save=['embed_tokens', 'lm_head'],
    ),
)  # fmt: skip

train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='PythonHelpText', split='train'),
)
val_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='PythonHelpText', split='test', indices=160),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='BitsPerByte')
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=False, max_iters=400, val_interval=100)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=5e-3, weight_decay=0.0))
param_scheduler = dict(type='CosineAnnealingLR', eta_min=5e-4, by_epoch=False)

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=20, log_metric_by_epoch=False),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=400, max_keep_ckpts=1),
)
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
