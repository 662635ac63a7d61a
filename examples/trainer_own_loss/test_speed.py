def test_speed(perf):
    perf.script("python train.py", cwd="examples/trainer_own_loss")
