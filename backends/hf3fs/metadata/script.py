"""What Redis does of one call, as one step: the script behind `shared`."""

SCRIPT = r"""
local base, verb, lease_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local meta, held, slots, used = base .. ':meta', base .. ':held', base .. ':slots', base .. ':used'
local free, writes, tokens = base .. ':free', base .. ':writes', base .. ':tokens'
local reads, leases, busy = base .. ':reads', base .. ':leases', base .. ':busy'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = 3 + ARGV[3]

local function rest(step)
  local list = {}
  for i = at + 1, #ARGV, step do
    list[#list + 1] = i
  end
  return list
end

local function end_read(lease)
  local list = redis.call('HGET', leases, lease)
  if list then
    for slot in string.gmatch(list, '%d+') do
      if redis.call('HINCRBY', busy, slot, -1) <= 0 then redis.call('HDEL', busy, slot) end
    end
    redis.call('HDEL', leases, lease)
  end
  redis.call('ZREM', reads, lease)
end

for i = 4, at do end_read(ARGV[i]) end
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', reads, '-inf', now)) do end_read(lease) end

-- A slot has an entry while it is reserved (state 1) or held by a page (2).
local function slot_of(slot)
  local text = redis.call('HGET', slots, slot)
  if not text then return nil end
  local generation, state, key, token = string.match(text, '^(%d+) (%d) (%x+) (%x*)$')
  return {generation = tonumber(generation), state = tonumber(state), key = key, token = token}
end

local function set_slot(slot, generation, state, key, token)
  redis.call('HSET', slots, slot, string.format('%.0f %d %s %s', generation, state, key, token))
end

local function place_of(key)
  local slot = redis.call('HGET', held, key)
  if not slot then return nil end
  return tonumber(slot), slot_of(slot).generation
end

local function unlist(slot, entry)
  redis.call('ZREM', writes, slot)
  redis.call('HDEL', tokens, entry.token .. entry.key)
end

local function let_go(slot, generation, state)
  local entry = slot_of(slot)
  if not entry or entry.generation ~= generation or entry.state ~= state then return 0 end
  if state == 2 then
    redis.call('HDEL', held, entry.key)
    redis.call('ZREM', used, slot)
  else
    unlist(slot, entry)
  end
  redis.call('HDEL', slots, slot)
  redis.call('ZADD', free, slot, slot)
  return 1
end

local function use(slot)
  redis.call('ZADD', used, redis.call('HINCRBY', meta, 'clock', 1), slot)
end

if verb == 'open' then
  local wanted, frame = tonumber(ARGV[at + 1]), ARGV[at + 2]
  local found = redis.call('HGET', meta, 'frame')
  if found and found ~= frame then return {-1, tonumber(found)} end
  redis.call('HSET', meta, 'frame', frame)
  wanted = math.max(wanted, tonumber(redis.call('HGET', meta, 'slots') or 0))
  redis.call('HSET', meta, 'slots', wanted)
  return {wanted}
end

local limit = tonumber(redis.call('HGET', meta, 'slots') or 0)
if limit == 0 then return redis.error_reply('NONAMESPACE it has no such namespace; open it first') end

if verb == 'exists' then
  local there = {}
  for _, i in ipairs(rest(1)) do there[#there + 1] = redis.call('HEXISTS', held, ARGV[i]) end
  return there

elseif verb == 'locate' then
  local lease, found, list, list_of_slots = 0, {}, rest(1), {}
  for n = #list, 1, -1 do
    local slot, generation = place_of(ARGV[list[n]])
    found[2 * n - 1], found[2 * n] = slot or -1, generation or 0
    if slot then
      use(slot)
      list_of_slots[#list_of_slots + 1] = slot
      redis.call('HINCRBY', busy, slot, 1)
    end
  end
  if #list_of_slots > 0 then
    lease = redis.call('HINCRBY', meta, 'lease', 1)
    redis.call('ZADD', reads, now + lease_ms, lease)
    redis.call('HSET', leases, lease, table.concat(list_of_slots, ' '))
  end
  table.insert(found, 1, lease)
  return found

elseif verb == 'touch' then
  local count = 0
  for _, i in ipairs(rest(1)) do
    local slot = place_of(ARGV[i])
    if slot then use(slot) count = count + 1 end
  end
  return count

elseif verb == 'reserve' then
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', writes, '-inf', now)) do
    let_go(slot, slot_of(slot).generation, 1)
  end
  local token, list, own, wanted, found = ARGV[at + 1], {}, {}, {}, {}
  for i = at + 2, #ARGV do list[#list + 1] = ARGV[i] end
  for n = #list, 1, -1 do
    local slot = place_of(list[n])
    if slot then use(slot) own[slot] = true end
  end
  for n, key in ipairs(list) do
    local there = redis.call('HEXISTS', held, key)
    local slot = redis.call('HGET', tokens, token .. key)
    found[3 * n - 2], found[3 * n - 1], found[3 * n] = there, -1, 0
    if there == 0 and slot then
      found[3 * n - 1], found[3 * n] = tonumber(slot), slot_of(slot).generation
    elseif there == 0 then
      wanted[#wanted + 1] = n
    end
  end
  local taken = {}
  local function take(list_of_slots)
    for _, slot in ipairs(list_of_slots) do
      slot = tonumber(slot)
      if #taken >= #wanted then return end
      if not own[slot] and redis.call('HEXISTS', busy, slot) == 0 then taken[#taken + 1] = slot end
    end
  end
  local more = redis.call('HLEN', busy) + #list
  take(redis.call('ZRANGE', free, 0, #wanted + more))
  for _, slot in ipairs(taken) do redis.call('ZREM', free, slot) end
  local known = tonumber(redis.call('HGET', meta, 'known') or 0)
  while #taken < #wanted and known < limit do
    taken[#taken + 1] = known
    known = known + 1
  end
  redis.call('HSET', meta, 'known', known)
  local before = #taken
  if before < #wanted then take(redis.call('ZRANGE', used, 0, #wanted + more)) end
  for n = before + 1, #taken do
    local entry = slot_of(taken[n])
    redis.call('HDEL', held, entry.key)
    redis.call('ZREM', used, taken[n])
  end
  table.sort(taken)
  -- Above all before, also those of a server that lost its last changes.
  local generation = math.max(tonumber(redis.call('HGET', meta, 'generation') or 0) + 1, now * 1000)
  for n, slot in ipairs(taken) do
    local key = list[wanted[n]]
    set_slot(slot, generation, 1, key, token)
    redis.call('HSET', tokens, token .. key, slot)
    redis.call('ZADD', writes, now + lease_ms, slot)
    found[3 * wanted[n] - 1], found[3 * wanted[n]] = slot, generation
    generation = generation + 1
  end
  redis.call('HSET', meta, 'generation', string.format('%.0f', generation))
  return found

elseif verb == 'confirm' then
  local verdicts, list = {}, rest(3)
  for n = #list, 1, -1 do
    local i = list[n]
    local key, slot, generation = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    local entry = slot_of(slot)
    if not entry or entry.generation ~= generation or entry.key ~= key then
      verdicts[n] = 'lost'
    elseif entry.state == 2 then
      verdicts[n] = 'stored'
    elseif redis.call('HEXISTS', held, key) == 1 then
      let_go(slot, generation, 1)
      verdicts[n] = 'existed'
    else
      unlist(slot, entry)
      set_slot(slot, generation, 2, key, '')
      redis.call('HSET', held, key, slot)
      use(slot)
      verdicts[n] = 'stored'
    end
  end
  return verdicts

elseif verb == 'release' then
  local count = 0
  for _, i in ipairs(rest(2)) do count = count + let_go(ARGV[i], tonumber(ARGV[i + 1]), 1) end
  return count

elseif verb == 'forget' then
  local dropped = {}
  for _, i in ipairs(rest(3)) do dropped[#dropped + 1] = let_go(ARGV[i + 1], tonumber(ARGV[i + 2]), 2) end
  return dropped

elseif verb == 'delete' then
  local dropped = {}
  for _, i in ipairs(rest(1)) do
    local slot, generation = place_of(ARGV[i])
    dropped[#dropped + 1] = slot and let_go(slot, generation, 2) or 0
  end
  return dropped

elseif verb == 'leaving' then
  local keys, count = {}, tonumber(ARGV[at + 1]) - (limit - redis.call('HLEN', slots))
  for n, slot in ipairs(count > 0 and redis.call('ZRANGE', used, 0, count - 1) or {}) do
    keys[n] = slot_of(slot).key
  end
  return keys

elseif verb == 'clear' then
  local list = redis.call('ZRANGE', used, 0, -1)
  for _, slot in ipairs(list) do let_go(slot, slot_of(slot).generation, 2) end
  return #list
end
"""
"""KEYS: the namespace's. ARGV: the verb, milliseconds of a lease, the number of ended reads, these, and what
the verb is given. All keys are of one hash slot."""
