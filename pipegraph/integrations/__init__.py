"""One module for each tool that trains or stores models. Each needs its tool, which nothing else of pipegraph imports.

accelerate     `PipelineAccelerator`: batches, clipping and gathering for the ranks of a pipeline
peft           `save_adapter`: adapters as PEFT reads them
transformers   `PipelineTrainer`: the Trainer of Hugging Face with a pipeline as its model
"""
