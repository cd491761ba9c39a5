import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "integration: talks to a real server on this machine")


@pytest.fixture(scope="session")
def s3_options():
    """moto's S3 server on a free loopback port, with a bucket; gives the storage options for it."""
    import botocore.session
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    options = {
        "key": "testing",
        "secret": "testing",
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
    }
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    client.create_bucket(Bucket="bucket")
    yield options
    server.stop()
