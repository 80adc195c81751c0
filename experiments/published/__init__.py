"""The paper's own numbers, one module for each experiment, under the label that the table or figure has there."""
