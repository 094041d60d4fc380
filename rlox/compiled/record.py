"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "ab25393567acdc11 ff664ac88f91be21",
    "rlox.algorithms.appo": "6978863034c3d203 f22b610a2c14ee4b",
    "rlox.algorithms.bc": "7b6d848ebda9d255 f4de416cd0c720c2",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "e78bb5a05309c592 d886fd1d9d2c2f8f",
    "rlox.algorithms.impala": "6b27a308f89fff9b c39caad81e70cec9",
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "44e6e7fb4d9c6618 8d404ba78236f34f",
    "rlox.algorithms.ppo": "7f40692012b41d12 1c60b3630c4b8423",
    "rlox.algorithms.sac": "e28a256a3d05e09f b609da37c2cec60f",
    "rlox.algorithms.td3": "862ae3793d95ec39 df4e94fbc17adf35",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "b3bbe9b89cb7b46f 63d09dbdb611ede3",
    "rlox.collectors.replay": "3def3843f4668364 76b95994ee43a907",
    "rlox.collectors.rollout": "df828b60f4895d14 0dba8397da771944",
    "rlox.envs.spec": "4848a26da6d1df6a 1179f99c216b7bcc",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "5dac89367c158fb7 952cf60ba7b1de32",
    "rlox.nn.actors": "5de32b8df2df79d6 50afab4cfbfd5465",
    "rlox.nn.batch": "3148bf73467de236 4181f79022483c34",
    "rlox.nn.losses": "92b913f5929b98b4 775dde49da165715",
    "rlox.nn.modules": "78877e864a5d767d c51d8fd875c87e1c",
    "rlox.nn.optimizers": "ed98ea0a9bf3affc 086e962c469b19c6",
    "rlox.nn.policies": "0b8b77693b113625 00b028dff76466be",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "5494c5745004a75e 1d4c2ef817cac145",
    "rlox.training.off_policy": "a89aed6ec1385096 c6ceb68d3d7cedf2",
    "rlox.training.offline": "b18182609a71f35e 835ee2098dd6e003",
    "rlox.training.on_policy": "0645adee36769f16 fcf1276fbe03c363",
    "rlox.training.replay": "9694cc4fdb903375 1f62e224a6736fcf",
}
