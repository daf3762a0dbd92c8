// A step cost for BLIS (inference-sim) that needs no model: a constant, a part for each request and one for each token,
// in µs from the variable LINEAR_COST_US ("8000,20,50"). To be put into sim/latency/, with these lines at the start of
// NewLatencyModel in sim/latency/latency.go:
//
//	if c, ok := linearFromEnvironment(); ok {
//		return c, nil
//	}
package latency

import (
	"fmt"
	"os"

	"github.com/inference-sim/inference-sim/sim"
)

// linearCost takes µs: a constant, a part for each request and one for each token of a step.
type linearCost struct{ step, request, token float64 }

func (c linearCost) StepTime(batch []*sim.Request) int64 {
	tokens, requests := 0, 0
	for _, r := range batch {
		if r.NumNewTokens > 0 {
			requests++
			tokens += r.NumNewTokens
		}
	}
	return int64(c.step + c.request*float64(requests) + c.token*float64(tokens) + 0.5)
}
func (c linearCost) QueueingTime(*sim.Request) int64  { return 0 }
func (c linearCost) OutputTokenProcessingTime() int64 { return 0 }
func (c linearCost) PostDecodeFixedOverhead() int64   { return 0 }

func linearFromEnvironment() (sim.LatencyModel, bool) {
	var c linearCost
	n, _ := fmt.Sscanf(os.Getenv("LINEAR_COST_US"), "%g,%g,%g", &c.step, &c.request, &c.token)
	return c, n == 3
}
