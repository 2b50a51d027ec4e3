"""Words that are not ours: flags and commands of other trainers, and settings of earlier versions."""
