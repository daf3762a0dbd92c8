"""Engines that fail in every way and callers who leave, all at random: every request gets one answer, its own."""

import asyncio
import json
import random
from collections import Counter

from latfit.live import HttpTimeouts
from tests.unit.live.front.engine import Answer, Asked, chunk, dies, engine, hangs, head, streamed, whole
from tests.unit.live.front.running import Reply, request, running, until

AT_ONCE = 40
REFUSED, PAUSE_S = (429, 503), 0.05
"""Answers after which a caller's place stays empty for so long: else all others come, and are refused at once, while
both engines rest, as they do where the machine stalls."""
TIMEOUTS = HttpTimeouts(connect_s=0.5, first_byte_s=0.15, between_s=0.15)


async def _echo(writer: asyncio.StreamWriter, asked: Asked) -> None:
    number = json.loads(asked.body)["number"]
    await asyncio.sleep(random.random() * 0.01)
    if number % 2:
        await whole(json.dumps({"number": number}).encode())(writer, asked)
        return
    await streamed([b'{"number":', b" %d}" % number], 0.002)(writer, asked)


async def _breaks_off(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(head("200 OK", "Transfer-Encoding: chunked") + chunk(b'{"num'))
    await asyncio.sleep(0.005)
    writer.close()


def _moody(rng: random.Random) -> Answer:
    ways: list[Answer] = [_echo, dies, hangs, _breaks_off, whole(b"{}", "500 Oh"), whole(b"{}", "503 No")]

    async def answer(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await rng.choices(ways, [0.9, 0.02, 0.02, 0.02, 0.02, 0.02])[0](writer, asked)

    return answer


def bad_day(requests: int, seed: int) -> Counter[str]:
    """How so many requests ended. Raises AssertionError where one got another one's answer, or something was left."""
    ended: Counter[str] = Counter()

    async def main() -> None:
        rng, turn = random.Random(seed), asyncio.Semaphore(AT_ONCE)
        async with (
            engine(_moody(rng)) as gpu,
            engine(_moody(rng)) as cpu,
            running([gpu, cpu], slots=8, timeouts=TIMEOUTS, most_waiting=20) as server,
        ):

            async def caller(number: int) -> None:
                async with turn:
                    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                    writer.write(request(json.dumps({"number": number}).encode()))
                    patience = rng.random() * 0.02 if rng.random() < 0.1 else 5.0
                    try:
                        found = Reply(await asyncio.wait_for(reader.read(), patience))
                    except TimeoutError:
                        ended["left"] += 1
                        return
                    except ConnectionError:
                        ended["cut off"] += 1
                        return
                    finally:
                        writer.close()
                    try:
                        if found.status == 200:
                            assert json.loads(found.body) == {"number": number}
                        ended[str(found.status)] += 1
                    except ValueError:
                        ended["cut off"] += 1
                        return
                    if found.status in REFUSED:
                        await asyncio.sleep(PAUSE_S)

            await asyncio.gather(*(caller(number) for number in range(requests)))
            await until(lambda: server.front.router.running == 0 and server.front.router.waiting == 0)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    assert sum(ended.values()) == requests
    return ended
