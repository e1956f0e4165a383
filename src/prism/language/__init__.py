"""Language models from text: tokens, training, generation, evaluation and export.

What enters here knows text; models/ has the network. Start with text.py and corpus.py (files to tokens), task.py (what is
trained), generate.py (a text token by token); chat.py for conversations.
"""
