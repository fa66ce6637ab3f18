"""Models: language model, masked language model, encoder-decoder, classifier, tagger."""
