"""Plan on a laptop for a cluster that is not there, with the commands of `lightning-pipe`.

lightning-pipe plan profile=vgg16.txt cluster=dapple_a samples=256
lightning-pipe explain model=package.module:Net batch=package.module:batch cluster=my_cluster.yaml
lightning-pipe schedules devices=8 microbatches=32 message=0.25
"""

from lightning_pipe.cli.command_line import main

__all__ = ["main"]
