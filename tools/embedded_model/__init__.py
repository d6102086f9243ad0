"""How the embedded model is made: facts and skills as text, training, evaluation."""
