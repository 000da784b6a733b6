"""Random numbers of stages as functions of keys, in the place of torch's generators."""
