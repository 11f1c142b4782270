"""Serve a pickled pipeline over HTTP with two processes that share the model's memory.

    gunicorn --chdir examples --preload --workers 2 "serve:make_app('sentiment.joblib')"
    curl -d '["a gripping film", "a tedious film"]' http://127.0.0.1:8000

The pipeline is loaded and used once before gunicorn forks its workers, so that they start warm and
share the pages of the weights. The answer is one probability per text.
"""

import json

import joblib

MOST_BYTES = 1_000_000


def make_app(path):
    """Load a pipeline that ends in a classifier; return a WSGI application."""
    pipeline = joblib.load(path)
    pipeline.predict_proba(["a first text, so that the model is loaded"])

    def answer(environ):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if environ["REQUEST_METHOD"] != "POST" or not 0 < length <= MOST_BYTES:
            return "400 Bad Request", f"POST a JSON list of texts, at most {MOST_BYTES} bytes"
        try:
            texts = json.loads(environ["wsgi.input"].read(length))
            probabilities = pipeline.predict_proba(texts)[:, 1].tolist() if texts else []
        except (ValueError, TypeError) as error:  # what is wrong with the texts is said in it
            return "400 Bad Request", str(error)
        return "200 OK", probabilities

    def app(environ, start_response):
        status, content = answer(environ)
        body = json.dumps(content).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return app
