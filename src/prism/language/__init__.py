"""Language models from text: tokens, training, generation, evaluation and export."""
