"""`bench`: a step measured here, or compiled for a target; and `train --dry_run`."""
