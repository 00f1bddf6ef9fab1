# Every process spreads its model over several devices.
model_parallel = dict(enable=True)
