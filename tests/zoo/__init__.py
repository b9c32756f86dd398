"""Every causal and encoder-decoder architecture of the installed `transformers`, tiny, and the verdict on each."""
