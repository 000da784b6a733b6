"""Recording a training loop into a run's folder."""
