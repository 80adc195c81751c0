"""What the demo shows: tables for the terminal, figures, sentences, and the HTML page of them all."""
