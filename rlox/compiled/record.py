"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "3e5b8e4f883e86cc f8f315c7069632cc",
    "rlox.algorithms.appo": "76b44ccfad1bbecb 15709b56c835b541",
    "rlox.algorithms.bc": "7b6d848ebda9d255 f4de416cd0c720c2",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "e78bb5a05309c592 d886fd1d9d2c2f8f",
    "rlox.algorithms.impala": "b421e74277fb2dfb 8e7fdcb31640135a",
    "rlox.algorithms.iql": "0e0499404eaa5dbe 7a489b63b37f6fd3",
    "rlox.algorithms.mappo": "3841d8abce6e6eb4 03945a567c064e16",
    "rlox.algorithms.ppo": "cb768d6b3c65720e 898db68ba2f0cce4",
    "rlox.algorithms.sac": "e28a256a3d05e09f b609da37c2cec60f",
    "rlox.algorithms.td3": "91d541742fb83695 efa58a8e5487456d",
    "rlox.algorithms.td3_bc": "55b4688b3742ee5b 990f2276485267cc",
    "rlox.checkpoint.counters": "8398163d4abedd49 85a566bf5954e84d",
    "rlox.collectors.replay": "0b3c25c9b5fc6de0 091f4a9bccdb1664",
    "rlox.collectors.rollout": "07c75157b4893af0 fd44831f19118fff",
    "rlox.envs.spec": "cd4ce556a60c476d 34abf356b7f76714",
    "rlox.multi_agent.players": "44b9b9dd68ba4e3d 2583236ed6e7bcb8",
    "rlox.nn.acting": "af7393a938e96ba2 c464cacd2e20890a",
    "rlox.nn.actors": "e1a6664f005b2546 7dd9e2fab33be6f3",
    "rlox.nn.batch": "2b99644e64f69c6a 0e46e5c8fc59b6ed",
    "rlox.nn.losses": "92b913f5929b98b4 775dde49da165715",
    "rlox.nn.modules": "c757f564d95d5d05 1fc57a1d37ec7348",
    "rlox.nn.networks": "001de2441a0bf62c 9366432a2792b64f",
    "rlox.nn.optimizers": "aaf1b58a42518b03 33898e63b33cd28e",
    "rlox.nn.policies": "7a0ecb1532ec9e1e 45de30b12da591d9",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "887b15f15ce1b2b6 a7a0af6c98c29097",
    "rlox.training.networks": "1a2a9923896b1391 a96604bd961ae66f",
    "rlox.training.off_policy": "7646c626f1036e15 95669352154c0dac",
    "rlox.training.offline": "319aaa88b96e5ab0 ff25995b4a63c1df",
    "rlox.training.on_policy": "bdb735a2f473122d 1967ae56a9fd79d9",
    "rlox.training.replay": "242706204b59fb90 cb9c2dba9bed24e1",
}
