"""Small models, one trap each, in the form that ``pipegraph split`` takes: ``build_model`` and ``example_inputs``.

Every ``build_model`` is seeded; example inputs are one microbatch.
"""
