"""The model side of a step: load, sample, take logprobs, learn, save."""
