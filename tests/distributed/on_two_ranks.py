"""Run by torchrun: compare trainings of two ranks with one process, with copies of the model and with shards of it."""

import joint_batches
import sharded_batches

joint_batches.main()
sharded_batches.main()
